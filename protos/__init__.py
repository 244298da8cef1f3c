"""The wire: the protobuf file, what is generated from it, and the one translator."""
