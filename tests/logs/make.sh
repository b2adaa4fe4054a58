#!/usr/bin/env bash
# Runs the jobs of this folder for real (simulated accelerator) and keeps what they print: bash tests/logs/make.sh [RAY_PYTHON]
# ONLY=torchrun-* makes some of them.
# Paths, hosts and addresses are replaced; nothing else is.
set -u
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); out=$here
export PYTHONPATH=$root PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
python=$root/.venv/bin/python
scrub() {
    sed -E -e "s#$root/tests/logs#/job#g; s#$root/\.venv[^/]*/lib/python3\.[0-9]+#/env/lib/python3.11#g; s#$root#/src#g" \
        -e "s#/[a-z/]*/lib/python3\.11/(concurrent|threading|runpy|asyncio)#/env/lib/python3.11/\1#g" \
        -e "s#$(hostname)#node1#g" -e 's#ip=[0-9.]+#ip=10.0.0.7#g' -e 's#/tmp/[A-Za-z0-9_./-]*#/tmp/scratch#g'
}
run() { # name, command...
    local name=$1; shift
    [[ $name == ${ONLY:-*} ]] || return 0
    timeout 170 "$@" 2>&1 | grep -v 'Warning\|authentication_token' | scrub > "$out/$name.log"
    echo "$name: $(wc -l < "$out/$name.log") lines"
}
torchrun="$python -m torch.distributed.run --nproc-per-node 2"
run torchrun-save $torchrun --master-port 29811 "$here/job.py" save
run torchrun-forward $torchrun --master-port 29812 "$here/job.py" forward
run torchrun-backward $torchrun --master-port 29813 "$here/job.py" backward
run torchrun-clip $torchrun --master-port 29814 "$here/job.py" clip
run torchrun-tee-step $torchrun --master-port 29815 --tee 3 --log-dir /tmp/diagkit-torchrun "$here/job.py" step
run torchrun-retry $torchrun --master-port 29816 "$here/job.py" retry
run torchrun-shape $torchrun --master-port 29817 "$here/job.py" shape
one="env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29818 $python $here/job.py"
run plain-buffers $one buffers
run plain-meta $one meta
run plain-retry-only $one retry-only
run plain-swap $one swap
if [ $# -gt 0 ]; then
    run ray-save "$1" "$here/ray_job.py" save 29821
    run ray-clip "$1" "$here/ray_job.py" clip 29822
fi
rm -rf /tmp/diagkit-torchrun
