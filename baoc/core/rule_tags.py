"""The tags of every update rule, from which bytes, risk terms, migration and allocation are derived.

Planning reads only these. A rule's arithmetic is in `baoc.optim.rules`, under the same name.
"""

from baoc.core import own_code
from baoc.types import RuleInfo, Scaling, StateDecl, StateKind, StateLayout

_M = StateDecl(name="m", kind=StateKind.M)
_M_UNCORRECTED = StateDecl(name="m", kind=StateKind.M, bias_corrected=False)
_V = StateDecl(name="v", kind=StateKind.V)
_V_PER_ROW = StateDecl(name="v", kind=StateKind.V, layout=StateLayout.PER_ROW)
_V_PER_COLUMN = StateDecl(name="v", kind=StateKind.V, layout=StateLayout.PER_COLUMN)
_V_FACTORED = (
    StateDecl(name="v_row", kind=StateKind.V, layout=StateLayout.PER_ROW, bias_corrected=False),
    StateDecl(name="v_col", kind=StateKind.V, layout=StateLayout.PER_COLUMN, bias_corrected=False),
)
FOLD_LEVELS = (1, 2, 3)  # FOAM averages 2^level neighbours


def _foam(level: int) -> RuleInfo:
    states = tuple(
        StateDecl(name=kind.value, kind=kind, layout=StateLayout.FOLDED, level=level)
        for kind in (StateKind.M, StateKind.V)
    )
    text = f"FOAM, m and v folded by {2**level} along fan_in"
    return RuleInfo(name=f"foam_l{level}", description=text, states=states, needs_matrix=True)


RULE_INFOS: dict[str, RuleInfo] = {
    info.name: info
    for info in (
        RuleInfo(name="adamw", description="AdamW, as torch computes it", states=(_M, _V), matched=False),
        RuleInfo(name="rmsprop", description="AdamW without momentum", states=(_V,)),
        RuleInfo(
            name="adamw_shared_in",
            description="AdamW with v shared along fan-in, one per row",
            states=(_M, _V_PER_ROW),
            needs_matrix=True,
            matched=False,
        ),
        RuleInfo(
            name="adamw_shared_out",
            description="AdamW with v shared along fan-out, one per column",
            states=(_M, _V_PER_COLUMN),
            needs_matrix=True,
            matched=False,
        ),
        RuleInfo(name="adafactor", description="Adafactor without momentum", states=_V_FACTORED, needs_matrix=True),
        RuleInfo(
            name="adafactor_momentum",
            description="Adafactor with momentum",
            states=(_M, *_V_FACTORED),
            needs_matrix=True,
            matched=False,
        ),
        RuleInfo(
            name="lion", description="sign of interpolated momentum", states=(_M_UNCORRECTED,), counts_steps=False
        ),
        RuleInfo(name="signum", description="sign of momentum", states=(_M_UNCORRECTED,), counts_steps=False),
        RuleInfo(
            name="muon",
            description="Muon: orthogonalized momentum, hidden matrices only",
            states=(_M_UNCORRECTED,),
            counts_steps=False,
            needs_matrix=True,
            hidden_only=True,
            scaling=Scaling.SPECTRAL,
        ),
        *map(_foam, FOLD_LEVELS),
        RuleInfo(name="sign", description="sign of the gradient", states=(), counts_steps=False),
        RuleInfo(
            name="column_norm",
            description="gradient with every column scaled to norm 1",
            states=(),
            counts_steps=False,
            needs_matrix=True,
            scaling=Scaling.COLUMN,
        ),
        RuleInfo(
            name="column_norm_momentum",
            description="momentum with every column scaled to norm 1",
            states=(_M_UNCORRECTED,),
            counts_steps=False,
            needs_matrix=True,
            scaling=Scaling.COLUMN,
        ),
    )
}

# Rules of other packages, each with the module of its arithmetic
OWN_RULES: dict[str, own_code.OwnRule] = {
    rule.info.name: rule
    for rule in own_code.load_entry_points("baoc.rules", kind=own_code.OwnRule).values()
    if rule.info.name not in RULE_INFOS
}
RULE_INFOS.update({name: rule.info for name, rule in OWN_RULES.items()})
