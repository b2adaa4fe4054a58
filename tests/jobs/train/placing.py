"""A helper somewhere in a job's own library."""


def place(model, device):
    """Make sure that the model is where it computes."""
    for child in model.children():
        _move(child, device)


def _move(module, device):
    module.to(device)
