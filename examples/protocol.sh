#!/usr/bin/env bash
# The whole protocol with the demo's model, each party in a folder of its own: bash examples/protocol.sh [DIR]
# On two machines, `mv` below is a copy over the network: copies one way, deltas the other, nothing else.
set -euo pipefail
work=${1:-protocol}
mkdir -p "$work"
cd "$work"
[ -d mpu-demo ] || mpu demo # makes a model that knows 200 invented facts

mkdir -p server client
cp mpu-demo/records/{forget,retain}.jsonl client/

echo "== server: publish" >&2
(cd server && mpu publish ../mpu-demo/models/target --symmetries all --kappa 0.01)
mv server/copy_1 server/copy_2 client/

echo "== client: unlearn" >&2
(cd client && for copy in copy_1 copy_2; do
  mpu unlearn "$copy" --algo npo --beta 0.5 --optim adamw-blockwise --lr 3e-4 --epochs 20 --batch-size 10
done)
mv client/deltas server/

echo "== server: aggregate" >&2
(cd server && mpu aggregate deltas/ --keys keys.bin)
echo "$work/server/unlearned"
