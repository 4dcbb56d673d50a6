"""Between the dataclasses of `shoal.types` and protobuf, with every size and value checked once, here."""
