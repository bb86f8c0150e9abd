@head@
RUN=@run@
@exports@
# Exit code 0: the run is done. 75: it is not, and has a newer checkpoint than at the start, so start it again.
# Any other: it ended without a new checkpoint, so starting it again would end the same way.
# A checkpoint that was fetched from a store is as old as can be. Where nodes share no folder, uploads count.
started="$RUN/.started-$NODE_RANK"
mkdir -p "$RUN" && touch "$started"
saved() {
  [ -n "$(find "$RUN/checkpoints" -maxdepth 1 '(' -name 'step-*' -o -name .uploaded ')' -newer "$started" 2>/dev/null)" ]
}
asked=0
# Workers get SIGUSR1 directly: torchrun passes no more than SIGTERM on. Again and again, since one that still imports
# torch does not listen.
save() {
  asked=1
  while kill -0 "$launcher" 2>/dev/null; do
    kill -USR1 $(grep -lsE "^PPid:[[:space:]]+$launcher\$" /proc/[0-9]*/status | cut -d/ -f3) 2>/dev/null || true
    sleep 5 || true
  done
}
# torchrun and its workers inherit that the signal is ignored. Slurm sends it to every process of a node.
trap '' USR1
# When a rank dies, all are started again in place, three times at most.
torchrun --nnodes "$NNODES" --nproc_per_node "$GPUS" --max_restarts 3 @rendezvous@ \
    -m meshwright train "$HERE/plan.yaml" resume=auto &
launcher=$!
trap save USR1 TERM
# A trapped signal ends `wait` early.
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
code=0
wait "$launcher" || code=$?
[ "$code$asked" != 00 ] || exit 0
if ! saved; then
  echo "launch.sh: the run ended with $code and without a new checkpoint: it is not started again" >&2
  exit $((code ? code : 1))
fi
exit 75
