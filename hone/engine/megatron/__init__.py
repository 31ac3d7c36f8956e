"""`strategy=megatron`: megatron-core trains the model (extra `megatron`)."""

import warnings

# At import, megatron-core warns about every fused kernel that is not installed.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
