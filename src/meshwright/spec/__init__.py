"""Description of a run: model shape, recipe, layout, cluster and plan. Standard library only."""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster, Device
    from meshwright.spec.inventory import Parameter, num_active_parameters, num_parameters, parameters
    from meshwright.spec.layout import Layout
    from meshwright.spec.plan import Data, Plan
    from meshwright.spec.recipe import BatchStage, Recipe
    from meshwright.spec.shape import MLAShape, ModelShape, MoEShape, RopeScaling

__all__ = [
    "BatchStage",
    "Cluster",
    "Data",
    "Device",
    "Layout",
    "MLAShape",
    "MoEShape",
    "ModelShape",
    "Parameter",
    "Plan",
    "Recipe",
    "RopeScaling",
    "num_active_parameters",
    "num_parameters",
    "parameters",
]

__getattr__ = lazy_names(__name__, {
    "BatchStage": "recipe", "Cluster": "cluster", "Data": "plan", "Device": "cluster", "Layout": "layout",
    "MLAShape": "shape", "MoEShape": "shape", "ModelShape": "shape", "Parameter": "inventory", "Plan": "plan",
    "Recipe": "recipe", "RopeScaling": "shape", "num_active_parameters": "inventory", "num_parameters": "inventory",
    "parameters": "inventory",
})  # fmt: skip
