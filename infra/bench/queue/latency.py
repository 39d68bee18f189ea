def latency_run(store, folder):
    raise NotImplementedError
