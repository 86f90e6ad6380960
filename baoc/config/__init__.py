"""From conf/ and a command line to one frozen `RunConfig`: schema, validation, composition, resolved defaults.

`schema` and `validate` import no Hydra, so that every stage may take a RunConfig; start reading there.
"""
