"""Values that live on many devices: one common type, a placement a class."""
