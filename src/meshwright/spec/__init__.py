"""What a run is: shapes, recipes, layouts, clusters, plans. Standard library only."""

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
