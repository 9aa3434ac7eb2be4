"""`QuantModel`, which is made of the parts of the other rooms, and a schedule that freezes its parts."""
