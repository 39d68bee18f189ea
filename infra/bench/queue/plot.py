def plot(runs):
    raise NotImplementedError
