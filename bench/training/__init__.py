"""The suite ``train``: optimizers train the same models on the same data within the same time."""
