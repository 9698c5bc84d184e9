"""Models of other tools, all as a `Source`: a model, and the unread data of its tensors."""
