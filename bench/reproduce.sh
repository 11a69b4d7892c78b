#!/usr/bin/env bash
# Every table of docs/RESULTS.md, by name, on the device at hand:
#
#   bench/reproduce.sh DATA OUT small 38m wikipedia speed crowded oversized streamed memory leak counts adaptive \
#     optimizers cascade stale uneven lead best \
#     workers codecs three-hosts pairs transfer recovery averaging simulate participation run-page hostile-clients \
#     first-steps attacks serving serving-gpu serving-cpu
#
# SEEDS, CODECS and WORKERS choose among the runs of workers and codecs.
# DATA holds wikitext-2/{train,valid,test}.txt and wikipedia/*; OUT gets JSON and logs. The parts of the
# first two lines need only torch, numpy, safetensors and filelock, the others all of blocktrain;
# `three-hosts` also Linux and root (or LINKS=--links); `serving` these and in MODELS the runs denoise,
# cascade and end-to-end; `serving-gpu` the run denoise and a GPU of 139 GiB. DB names an empty
# PostgreSQL database for `pairs`. A part of quality that was stopped goes on when called again.
set -euo pipefail
cd "$(dirname "$0")/.."
data=$(realpath "$1") out=$2
shift 2
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 BLOCKTRAIN_CACHE=${BLOCKTRAIN_CACHE:-$out/cache}
runs=${RUNS:-$out/runs}
crew="swarm.quorum=6"  # a version waits for all workers of its block
often="swarm.most_steps=25 swarm.top_k_per_4096=120"  # sparse: many small updates, and larger final ones

quality() { # NAME CONFIG SOURCE OPTIONS...
  local name=$1 config=$2 source=$3
  shift 3
  python3 bench/quality.py --config "configs/$config.toml" --out "$runs/$name" \
    --json "$out/$name.json" --set "data.source=text:$data/$source" train.save_every=100000 "$@" |
    tee "$out/$part.log"
}

serving() { # NAME PART OPTIONS...
  local name=$1 part=$2
  shift 2
  PYTHONPATH=src:. python3 bench/serving.py "$part" "${MODELS:-$out/models}/$name" \
    --out "$out/serving-$name" --text "$data/wikitext-2/test.txt" "$@" |
    tee "$out/serving-$name-$part.log"
}

for part in "$@"; do
  case $part in
    small) quality small wikitext2-small 'wikitext-2/*.txt' --seeds 0 1 2 ;;
    38m) quality 38m wikitext2-38m 'wikitext-2/*.txt' --kinds end-to-end denoise --seeds 0 1 2 \
      --grid model.dropout=0.0,0.1,0.2,0.3 --choose ;;
    workers) quality 38m wikitext2-38m 'wikitext-2/*.txt' $crew --kinds denoise workers \
      --seeds ${SEEDS:-0 1 2} --grid model.dropout=0.0 swarm.codec=none --against denoise ;;
    codecs) quality 38m wikitext2-38m 'wikitext-2/*.txt' $crew $often --kinds denoise workers \
      --workers ${WORKERS:-4} --seeds ${SEEDS:-0 1 2} --grid model.dropout=0.0 \
      swarm.codec=${CODECS:-none,bf16,int8,sparse} --against denoise ;;
    wikipedia) quality wikipedia wikipedia-38m 'wikipedia/*' --splits valid ;;
    leak) quality leak wikitext2-small 'wikitext-2/*.txt' --kinds denoise --splits test \
      --grid objective.sigma_min=0.1,0.5,1.0,2.0 ;;
    counts) quality counts wikitext2-small 'wikitext-2/*.txt' model.layers=12 --splits test \
      --kinds end-to-end denoise cascade --grid model.blocks=2,4,6,12 ;;
    adaptive) quality adaptive wikitext2-small 'wikitext-2/*.txt' --kinds denoise --splits test \
      --grid objective.partition=lognormal,adaptive ;;
    cascade) quality cascade wikipedia-38m 'wikipedia/*' --splits valid \
      --kinds end-to-end cascade swarm ;;
    stale) quality cascade wikipedia-38m 'wikipedia/*' --splits valid \
      --kinds end-to-end cascade --stale 50 250 ;;
    uneven) quality cascade wikipedia-38m 'wikipedia/*' --splits valid \
      --kinds end-to-end cascade --shares 1 0.25 1 1 ;;
    optimizers)
      for pair in adamw,1e-3 adamw,2e-3 muon,2e-3 muon,4e-3 muon,8e-3; do
        quality optimizers wikipedia-38m 'wikipedia/*' --splits valid --kinds fitting \
          --grid train.optimizer=${pair%,*} train.lr=${pair#*,}
      done ;;
    lead)
      for kind in 'end-to-end' 'cascade --grid objective.lead=0,0.25,0.5,1'; do
        quality lead wikipedia-38m 'wikipedia/*' model.width=256 model.heads=4 model.window=256 \
          train.batch=16 train.steps=1200 --splits valid --kinds $kind
      done ;;
    oversized) PYTHONPATH=src python3 bench/oversized.py --out "$out" | tee "$out/$part.log" ;;
    streamed) PYTHONPATH=src:bench python3 bench/streamed.py 1b --out "$out" | tee "$out/$part.log" ;;
    run-page) PYTHONPATH=src:. python3 bench/run_page.py --out "$out" | tee "$out/$part.log" ;;
    first-steps) python3 bench/first_steps.py --config demo --out "$out" | tee "$out/$part.log" ;;
    crowded) python3 bench/crowded.py --config configs/demo.toml --out "$out" | tee "$out/$part.log" ;;
    speed | memory) python3 "bench/$part.py" --config configs/wikitext2-38m.toml --out "$out" |
      tee "$out/$part.log" ;;
    best)
      quality best wikitext2-38m 'wikitext-2/*.txt' --kinds end-to-end cascade --splits test \
        --grid model.dropout=0.1
      PYTHONPATH=src:. python3 bench/serving.py quality "$runs"/best/cascade-* \
        --reference "$runs"/best/end-to-end-* --out "$out/serving-best" --device cuda \
        --text "$data/wikitext-2/test.txt" --modes ar speculative "sweep K=1" "sweep K=2" "sweep K=4" |
        tee "$out/serving-best.log" ;;
    serving)
      for name in denoise cascade; do
        serving $name quality --reference "${MODELS:-$out/models}/end-to-end"
        serving $name wire
        serving $name weights
      done
      for measure in wan concurrency failover; do serving denoise $measure; done ;;
    serving-load)
      for measure in stalls prefixes concurrency replicas; do
        PYTHONPATH=src:.:bench python3 bench/serving_load.py $measure --out "$out/serving-load" |
          tee "$out/serving-load-$measure.log"
      done ;;
    serving-gpu) python3 bench/serving_gpu.py --out "$out" --text "$data/wikitext-2/test.txt" \
      --run "${MODELS:-$out/models}/denoise" | tee "$out/serving-gpu.log" ;;
    serving-cpu)
      PYTHONPATH=$PYTHONPATH:. python3 bench/serving_cpu.py --out "$out" --model "$out/0.6B" \
        --weights fp32-full bf16-full fp32-int8 bf16-int8 | tee "$out/serving-cpu.log"
      for measure in start loopback; do
        PYTHONPATH=$PYTHONPATH:. python3 bench/serving_start.py $measure "$out/0.6B/run" --out "$out" |
          tee "$out/serving-$measure.log"
      done ;;
    pairs) python3 bench/coordinator.py --out "$out/pairs" ${DB:+--db "$DB"} |
      tee "$out/pairs.log" ;;
    transfer | simulate) python3 "bench/$part.py" --out "$out/$part" | tee "$out/$part.log" ;;
    recovery) python3 bench/recovery.py --out "$out/recovery" --kills 5 | tee "$out/recovery.log" ;;
    hostile-clients) PYTHONPATH=$PYTHONPATH:.:bench python3 bench/hostile_clients.py --rounds 3 \
      --out "$out/hostile-clients" | tee "$out/hostile-clients.log" ;;
    attacks) PYTHONPATH=$PYTHONPATH:.:bench python3 bench/attacks.py --defence off on \
      --out "$out/attacks" | tee "$out/attacks.log" ;;
    participation) python3 bench/participation.py --out "$out/participation" --seeds ${SEEDS:-0 1} |
      tee "$out/participation.log" ;;
    averaging) PYTHONPATH=$PYTHONPATH:bench python3 bench/peers/averaging.py --rounds 15 \
      --out "$out/averaging" | tee "$out/averaging.log" ;;
    three-hosts)  # LINKS=--links where there are no namespaces, THREADS of each worker
      PYTHONPATH=$PYTHONPATH:. python3 bench/three_hosts.py --out "$out/three-hosts" \
        --config configs/wikitext2-small.toml --data "text:$data/wikitext-2/*.txt" \
        --set swarm.grace_seconds=2 --round-trips ${TRIPS:-20 50 100} --codecs ${CODECS:-int8} \
        --threads ${THREADS:-1} --score-device ${SCORE_DEVICE:-cpu} ${LINKS:-} |
        tee "$out/three-hosts.log" ;;
    *) echo "no part named $part" >&2 && exit 2 ;;
  esac
done
