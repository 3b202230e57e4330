"""From a teacher checkpoint to a small, aligned, 4-bit model and the verdict on its release."""
