"""A small transformer that sorts the digits of a sequence, trained by `halfserve train` and ready for `halfserve export`.

Its three functions are what the command asks for: `model()`, `data()`, and a loss that leaves the padding out.

    halfserve train examples.transformer.model:model --data examples.transformer.data:data \
        --loss examples.transformer.loss:loss --learning-rate 0.01 --policy cuda --epochs 6 --out runs/transformer
    halfserve export runs/transformer/checkpoint.pt --repository runs/models --name sorter

With `--batch-size 16 --accumulate 4` each step still follows 64 sequences, with activations of only 16 in memory at a time.

The same in float32, float16 and bfloat16, with the share of digits put in their right places:

    python -m examples.transformer
    python -m examples.transformer --policy cuda+fp32:linear --accumulate 4 --json

The forward pass is right in every dtype: the mask takes the smallest number of the dtype in use rather than -1e9, which is
minus infinity in float16, and queries are divided by the root of their width before the product with the keys, not after it.
"""
