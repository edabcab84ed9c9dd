"""A layer in parts over links of a known rate: what parts gain there, and how far the model of them is off."""
