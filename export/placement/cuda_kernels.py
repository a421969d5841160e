"""Which operators ONNX Runtime computes on CUDA, and in which floating types.

Source: the kernel registry of onnxruntime-gpu 1.31.1 itself, as printed by `python -m export.placement.kernel_registry
CUDAExecutionProvider`. A line is an operator with ranges of opsets and the types that its kernels take there: h float16,
f float32, d float64, b bfloat16, n any other. What is not listed has no CUDA kernel and runs on the CPU.
"""

from __future__ import annotations

from functools import cache

from export.placement.kernel_registry import Registry, parse_table

RUNTIME_VERSION = "1.31.1"


@cache
def cuda_kernels() -> Registry:
    """The table below, read once."""
    return parse_table(_TABLE)


_TABLE = """
Abs 6-12 hfdn; 13+ hfdbn
Add 7-12 hfdn; 13+ hfdbn
Affine 1+ hfd
And 7+ n
ArgMax 1+ hfd
ArgMin 1+ hfd
Attention 23+ hfbn
AveragePool 7-21 hfd; 22+ hfdb
BatchNormalization 7+ hfd
Cast 6+ hfdbn
Ceil 6+ hfd
Clip 6-11 f; 12+ hfdn
Compress 9+ hfdbn
Concat 4+ hfdbn
ConcatFromSequence 11+ hfdbn
ConstantOfShape 9+ hfdbn
Conv 1-21 hfd; 22+ hfdb
ConvTranspose 1+ hfd
Cos 7-21 hfd; 22+ hfdb
Crop 1+ hfd
CumSum 11-13 fdn; 14+ hfdn
DeformConv 19-21 hfd; 22+ hfdb
DepthToSpace 1+ hfd
DequantizeLinear 10-18 n; 19+ hfn
Div 7-12 hfdn; 13+ hfdbn
Dropout 7-9 hfd; 10-12 hfdn; 13+ hfdbn
DynamicSlice 1+ hfdbn
Einsum 12+ hfd
Elu 6+ hfd
Equal 7-10 n; 11+ hfdn
Erf 9-12 hfd; 13+ hfdb
Exp 6-12 hfd; 13+ hfdb
Expand 8+ hfdbn
EyeLike 9+ fdn
Flatten 1+ hfdbn
Floor 6+ hfd
GRU 7+ hfdn
Gather 1+ hfdbn
GatherElements 11+ hfdbn
GatherND 11-12 hfdn; 13+ hfdbn
Gelu 20+ hfdb
Gemm 7-12 hfd; 13+ hfdb
GlobalAveragePool 1+ hfd
GlobalMaxPool 1+ hfd
Greater 7-8 hfd; 9+ hfdn
GreaterOrEqual 12+ hfdn
GridSample 16+ f
HardSigmoid 6-21 hfd; 22+ hfdb
HardSwish 14-21 hfd; 22+ hfdb
Identity 1+ hfdbn
If 1+ hfdbn
ImageScaler 1+ hfd
InstanceNormalization 6+ hfd
IsInf 10-19 fdn; 20+ hfdbn
IsNaN 9-12 hfdn; 13+ hfdbn
LRN 1+ hfd
LSTM 7+ hfdn
LayerNormalization 1+ hfdb
LeakyRelu 6+ hfd
Less 7-8 hfd; 9+ hfdn
LessOrEqual 12+ hfdn
Log 6+ hfd
LogSoftmax 1+ hfd
Loop 1+ hfdbn
LpNormalization 1-21 hf; 22+ hfb
MatMul 1-12 hfd; 13+ hfdb
MatMulInteger 10+ n
Max 6-11 hfdb; 12+ hfdbn
MaxPool 1-7 hfd; 8+ hfdn
MemcpyFromHost 1+ hfdbn
MemcpyToHost 1+ hfdbn
Min 6-11 hfdb; 12+ hfdbn
Mod 10-12 hfdn; 13+ hfdbn
Mul 7-12 hfdn; 13+ hfdbn
Neg 6-12 hfdn; 13+ hfdbn
NonMaxSuppression 10+ n
NonZero 9+ hfn
Not 1+ n
OneHot 11+ hfn
Or 7+ n
PRelu 7+ hfd
Pad 2-12 hfd; 13+ hfdn
ParametricSoftplus 1+ hfd
Pow 7-11 hfd; 12-12 hfdn; 13+ hfdbn
QuantizeLinear 10-18 fn; 19+ hfn
RMSNormalization 23+ hfdb
RNN 7+ hfdn
RandomNormal 1-21 hfd; 22+ hfdb
RandomNormalLike 1+ hfdbn
RandomUniform 1-21 hfd; 22+ hfdb
RandomUniformLike 1+ hfdbn
Range 11+ fdn
Reciprocal 6+ hfd
ReduceL1 1+ hfdn
ReduceL2 1+ hfdn
ReduceLogSum 1+ hfd
ReduceLogSumExp 1+ hfd
ReduceMax 1+ hfdn
ReduceMean 1+ hfdbn
ReduceMin 1+ hfdn
ReduceProd 1+ hfdn
ReduceSum 1-12 hfdn; 13+ hfdbn
ReduceSumSquare 1+ hfd
Relu 6-12 hfd; 13+ hfdb
Reshape 1+ hfdbn
Resize 10+ hfdn
ReverseSequence 10+ hfdbn
RoiAlign 10-15 fdn; 16-21 hfdn; 22+ hfdbn
RotaryEmbedding 23+ hfbn
Round 11+ hfd
ScaledTanh 1+ hfd
Scan 8+ hfdbn
Scatter 9-10 hfdbn
ScatterElements 11+ hfdbn
ScatterND 11+ hfdbn
Selu 6+ hfd
SequenceAt 11+ hfdbn
SequenceConstruct 11+ hfdbn
SequenceEmpty 11+ hfdbn
SequenceErase 11+ hfdbn
SequenceInsert 11+ hfdbn
SequenceLength 11+ hfdbn
Shape 1+ hfdbn
Shrink 9+ hfdn
Sigmoid 6-12 hfd; 13+ hfdb
Sign 13+ hfdbn
SimplifiedLayerNormalization 1+ hfdb
Sin 7-21 hfd; 22+ hfdb
Size 1+ hfdbn
Slice 1+ hfdbn
Softmax 1-12 hfd; 13+ hfdb
Softplus 1-21 hfd; 22+ hfdb
Softsign 1-21 hfd; 22+ hfdb
SpaceToDepth 1+ hfd
Split 2+ hfdbn
Sqrt 6-12 hfd; 13+ hfdb
Squeeze 1+ hfdbn
Sub 7-12 hfdn; 13+ hfdbn
Sum 6+ hfdb
Tanh 6-12 hfd; 13+ hfdb
TensorScatter 24+ hfdbn
ThresholdedRelu 1+ hfd
Tile 6-12 hfdn; 13+ hfdbn
TopK 1-23 hfdn; 24+ hfdbn
Transpose 1+ hfdbn
Trilu 14+ hfdbn
Unsqueeze 1+ hfdbn
Upsample 7-9 hfdn
Where 9-15 hfdn; 16+ hfdbn
Xor 7+ n
ai.onnx.ml:LabelEncoder 2-3 fn; 4+ fdn
com.microsoft:Attention 1+ hfb
com.microsoft:BeamSearch 1+ hf
com.microsoft:BiasAdd 1+ hf
com.microsoft:BiasDropout 1+ hfdbn
com.microsoft:BiasGelu 1+ hfdb
com.microsoft:BiasSoftmax 1+ hfd
com.microsoft:BiasSplitGelu 1+ hf
com.microsoft:BitmaskBiasDropout 1+ hfdbn
com.microsoft:BitmaskDropout 1+ hfdbn
com.microsoft:BranchwiseRMSNorm 1+ hfb
com.microsoft:CausalConvWithState 1+ hfb
com.microsoft:ComplexMul 1+ hf
com.microsoft:ComplexMulConj 1+ hf
com.microsoft:ConvTransposeWithDynamicPads 1+ f
com.microsoft:DecoderAttention 1+ hf
com.microsoft:DecoderMaskedMultiHeadAttention 1+ hf
com.microsoft:DecoderMaskedSelfAttention 1+ hf
com.microsoft:DequantizeLinear 1+ hn
com.microsoft:DequantizeWithOrder 1+ hfn
com.microsoft:DynamicSparseAttention 1+ hfbn
com.microsoft:DynamicTimeWarping 1+ fn
com.microsoft:EmbedLayerNormalization 1+ hf
com.microsoft:EngramGate 1+ hfb
com.microsoft:FastGelu 1+ hfdb
com.microsoft:FusedConv 1+ f
com.microsoft:FusedMatMul 1+ hfdb
com.microsoft:GatedAdd 1+ hfb
com.microsoft:GatedDeltaNet 1+ hfbn
com.microsoft:GatedRMSNorm 1+ hfb
com.microsoft:GatedRelativePositionBias 1+ hf
com.microsoft:GatherBlockQuantized 1+ hfbn
com.microsoft:Gelu 1+ hfdb
com.microsoft:GemmFloat8 1+ hfbn
com.microsoft:GemmaRotaryEmbedding 1+ hf
com.microsoft:GreedySearch 1+ hf
com.microsoft:GridSample 1+ f
com.microsoft:GroupNorm 1+ hf
com.microsoft:GroupQueryAttention 1+ hfbn
com.microsoft:HyperConnectionPostMix 1+ hfb
com.microsoft:HyperConnectionPreMix 1+ hfb
com.microsoft:Inverse 1+ hfd
com.microsoft:Irfft 1+ hfd
com.microsoft:LinearAttention 1+ hfb
com.microsoft:LinearAttentionGate 1+ hfb
com.microsoft:LongformerAttention 1+ hf
com.microsoft:MRotaryEmbedding 1+ hfbn
com.microsoft:MatMulBlockQuantizedFp4Weight 1+ hfbn
com.microsoft:MatMulBlockQuantizedFp8Weight 1+ hfbn
com.microsoft:MatMulBnb4 1+ hfbn
com.microsoft:MatMulNBits 1+ hfbn
com.microsoft:MoE 1+ hfb
com.microsoft:MultiHeadAttention 1+ hfb
com.microsoft:NGramHashMapping 1+ n
com.microsoft:NGramRepeatBlock 1+ fn
com.microsoft:NhwcConv 1+ hf
com.microsoft:PackedAttention 1+ hf
com.microsoft:PackedMultiHeadAttention 1+ hf
com.microsoft:PackedSparseAttentionIndexer 1+ hfbn
com.microsoft:PagedAttention 1+ hfbn
com.microsoft:QAttention 1+ hfn
com.microsoft:QMoE 1+ hfbn
com.microsoft:QOrderedAttention 1+ fn
com.microsoft:QOrderedGelu 1+ fn
com.microsoft:QOrderedLayerNormalization 1+ hfn
com.microsoft:QOrderedLongformerAttention 1+ hfn
com.microsoft:QOrderedMatMul 1+ fn
com.microsoft:QuantizeLinear 1+ hn
com.microsoft:QuantizeWithOrder 1+ hfn
com.microsoft:QuickGelu 1+ hfdb
com.microsoft:RelativePositionBias 1+ hf
com.microsoft:RemovePadding 1+ hf
com.microsoft:RestorePadding 1+ hf
com.microsoft:Rfft 1+ hfd
com.microsoft:RotaryEmbedding 1+ hfbn
com.microsoft:Sampling 1+ hf
com.microsoft:ScaledSiLU 1+ hfb
com.microsoft:SkipGroupNorm 1+ hf
com.microsoft:SkipLayerNormalization 1+ hfb
com.microsoft:SkipSimplifiedLayerNormalization 1+ hfb
com.microsoft:SparseAttention 1+ hbn
com.microsoft:SparseAttentionIndexer 1+ hfbn
com.microsoft:SparsePagedAttention 1+ hfbn
com.microsoft:TransposeMatMul 1+ hfdb
com.microsoft:Trilu 1+ hfdbn
com.microsoft:UnfoldTensor 1+ hfdbn
com.microsoft:VarlenCausalConvWithState 1+ hfbn
com.microsoft:VarlenNGramHashMapping 1+ n
com.microsoft:WhisperBeamSearch 1+ hf
"""
