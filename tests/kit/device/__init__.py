"""A fake device for collectives without a GPU, and defects that can be planted in the code for devices."""
