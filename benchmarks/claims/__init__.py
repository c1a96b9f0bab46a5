"""Whether the library keeps what its README and its pages claim."""
