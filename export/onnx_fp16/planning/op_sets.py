"""Groups of ONNX operators that rules speak of."""

from __future__ import annotations


def operators(names: str) -> frozenset[str]:
    """The operators that a text names, with spaces between."""
    return frozenset(names.split())


# These hand their input's numbers on.
MOVERS = operators(
    """
    Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Slice SpaceToDepth Split Squeeze Tile
    Transpose Unsqueeze
    """
)
# One number in, one number out, place by place.
ELEMENTWISE = operators(
    """
    Abs Add Cast Ceil Clip Div Exp Floor Log Max Mean Min Mod Mul Neg Pow Reciprocal Relu Round Sigmoid Sign Softplus Sqrt Sub
    Sum Tanh Where
    """
)
REDUCTIONS = operators("CumSum ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum")
COMPARISONS = operators("Equal Greater GreaterOrEqual Less LessOrEqual")
# Their results are whole numbers: where they meet numbers that were integers, indices are being computed.
ROUNDINGS = operators("Ceil Floor Mod Round")
# Their results are places. (Sizes, which Shape gives, mostly scale data, and are rounded as harmlessly as those.)
INDEX_SOURCES = operators("ArgMax ArgMin NonMaxSuppression NonZero Range TopK")
# What they take is data, of which only sizes, places or counts go on.
DATA_ENDS = operators("ArgMax ArgMin NonMaxSuppression NonZero Shape Size TopK")
# They draw other numbers in each run; so does Dropout in training mode.
RANDOM = operators("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike")
PERIODIC = operators("Cos Sin")
LINEAR = operators("Einsum MatMul")

# Inputs that say how large something is, or where it begins, by operator.
SHAPE_INPUTS = {
    "AffineGrid": (1,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "DFT": (1,),
    "Expand": (1,),
    "Loop": (0,),
    "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Tile": (1, 2),
    "TopK": (1,),
    "Trilu": (1,),
    "Upsample": (1,),
}
