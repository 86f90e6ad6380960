"""Doors into other people's trainers, one module each, imported by name: nothing here is loaded by `import baoc`."""
