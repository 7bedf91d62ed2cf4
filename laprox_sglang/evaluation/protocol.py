"""What both halves of the evaluation agree on; imports nothing."""

# The cache salt of the dense document.
REFERENCE = "reference"
# The name of the method that patches.evaluation_rpc adds to the scheduler.
METHOD = "laprox_evaluate"
