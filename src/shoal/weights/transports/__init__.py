"""How weight bytes reach an engine worker's staging buffer; pick one through `factory`."""
