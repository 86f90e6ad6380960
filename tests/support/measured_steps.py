"""What the first plan of a process measures, measured as this is imported: once by a server, for all of its forks."""

from baoc.core.rule_tags import RULE_INFOS
from baoc.data import build_data
from baoc.models import build_model
from baoc.planning.planner import PlannerSettings
from baoc.profiling.step_temporaries import step_temporaries

digits = build_data("digits", task="vision", batch_size=1).spec
params = list(build_model("vit", spec=digits, size="tiny", seed=0).parameters())
specs = PlannerSettings().all_specs.values()
step_temporaries((spec for spec in specs if not RULE_INFOS[spec.rule].hidden_only), params=params)
step_temporaries(
    (spec for spec in specs if RULE_INFOS[spec.rule].hidden_only), params=[p for p in params if p.ndim == 2]
)
