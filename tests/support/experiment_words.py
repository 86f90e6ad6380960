"""The words on a command line that make any experiment run in seconds on a CPU."""

SMALL = ["debug=fast_dev", "device=cpu", "batch_size=8", "checkpoint.export=false", "trainer.enable_progress_bar=false"]

OF_MODEL = {
    "vit": ["model.size=tiny"],
    "dit": ["model.size=tiny", "task.num_samples=0"],
    "unet": ["model.size=tiny", "task.num_samples=0"],
    "llama": ["model.size=nano", "dataset.max_val_sequences=8"],
}
