"""How bytes travel from source ranks to engines."""
