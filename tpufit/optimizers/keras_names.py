"""Keras's optimizers that PyTorch lacks, each with a replacement."""

NEAREST = {
    "ftrl": "Pass pytorch_optimizer.FTRL of the package pytorch-optimizer.",
    "lamb": "Pass timm.optim.Lamb of the package timm.",
    "lion": "Pass timm.optim.Lion of the package timm.",
    "loss_scale_optimizer": "Losses need no scaling here: precision='bf16' has the range of float32.",
    "multi_optimizer": "Keep the others as attributes of your Model, and call apply_gradients for each in train_step, "
    "as examples/gan.py does; or use one optimizer with several parameter groups.",
    "schedule_free_adam_w": "Pass schedulefree.AdamWScheduleFree of the package schedulefree.",
}
