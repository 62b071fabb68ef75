"""A callback that interrupts a run at a given step."""


class InterruptionError(Exception):
    pass


def interrupt_at(step):
    def callback(record, optimizer):
        if record["step"] == step:
            raise InterruptionError

    return callback
