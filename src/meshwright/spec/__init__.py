"""Description of a run: model shape, recipe, layout, cluster and plan. Standard library only."""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.spec.layout.cluster import Cluster, Device
    from meshwright.spec.layout.layout import Layout
    from meshwright.spec.model.shape import MLAShape, ModelShape, MoEShape, RopeScaling
    from meshwright.spec.plan.plan import Data, Plan
    from meshwright.spec.recipe.recipe import BatchStage, Recipe
    from meshwright.spec.weights.inventory import Parameter, num_active_parameters, num_parameters, parameters

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

__getattr__ = lazy_names(
    __name__,
    {
        "BatchStage": "recipe.recipe",
        "Cluster": "layout.cluster",
        "Data": "plan.plan",
        "Device": "layout.cluster",
        "Layout": "layout.layout",
        "MLAShape": "model.shape",
        "MoEShape": "model.shape",
        "ModelShape": "model.shape",
        "Parameter": "weights.inventory",
        "Plan": "plan.plan",
        "Recipe": "recipe.recipe",
        "RopeScaling": "model.shape",
        "num_active_parameters": "weights.inventory",
        "num_parameters": "weights.inventory",
        "parameters": "weights.inventory",
    },
)
