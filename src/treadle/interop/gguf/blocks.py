"""The formats of blocks by name: encode and decode, and their parts for programs that decode."""

from treadle.base.blocks import BLOCKS as BLOCKS
from treadle.base.blocks import BlockFormat as BlockFormat
from treadle.base.blocks import block_format as block_format
from treadle.base.blocks import decoded as decoded
from treadle.base.blocks import encoded as encoded
from treadle.base.blocks import scales_and_codes as scales_and_codes
