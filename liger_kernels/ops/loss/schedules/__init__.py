"""The schedules of the linear cross entropy: the orders in which the logits of a head are computed in parts."""
