"""`QuantModel`, which connects the parts of the other rooms, and a schedule that freezes its parts."""
