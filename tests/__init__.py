import sys

# transformers imports torchvision wherever it is installed, and some builds of that don't match
# the CPU build of torch; nothing here needs it.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
