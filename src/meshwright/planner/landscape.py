def landscape(of, plan):
    return {}
