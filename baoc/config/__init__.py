"""From a command line to one frozen `RunConfig`: the schema of conf/, its Hydra door, and the command itself.

`schema` and `strict` import no Hydra, so every stage may take a RunConfig; start reading there.
"""
