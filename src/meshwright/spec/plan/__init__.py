"""Plan of one run: model, recipe, layout, cluster and data; and what a device chooses by it."""
