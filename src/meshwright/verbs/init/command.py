"""`meshwright init`: print a commented plan."""


def init() -> None:
    """Print a commented plan that trains a small model on the default text: meshwright init > plan.yaml."""
    from meshwright.planfile import commented

    print(commented(), end="")
