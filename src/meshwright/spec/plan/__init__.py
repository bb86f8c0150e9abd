"""Plan: model, recipe, layout, cluster and data of one run."""
