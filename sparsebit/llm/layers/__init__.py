"""Linear layers with packed or scaled weights, and the products that they call."""
