#!/usr/bin/env bash
# A run on several nodes of a Slurm cluster: sbatch slurm.sh federation.yaml /shared/runs/federation
# A run that was stopped, by its time limit for instance, goes on when the same command is given again.
#SBATCH --job-name=raysim
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=2
#SBATCH --time=12:00:00
set -euo pipefail
config=$1 # both on a file system that all nodes share
run=$2

source "$HOME/venv/bin/activate" # an environment with raysim, the same on all nodes

# No one else on the nodes' network can join: Ray asks for this token.
umask 077
token=$(mktemp -p "$HOME" raysim-token.XXXXXX) # the home folder is shared, too
trap 'rm -f "$token"' EXIT
python -c "import secrets; print(secrets.token_hex(32), end='')" > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000)) # other jobs may share the node
resources=(--num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_PER_TASK:-0}" --disable-usage-stats)

srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
    ray start --block --head --node-ip-address="$address" --port="$port" --include-dashboard=false "${resources[@]}" &
until ray status --address "$address:$port" > /dev/null 2>&1; do sleep 2; done
if ((SLURM_JOB_NUM_NODES > 1)); then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --overlap --exclude="$head" \
        ray start --block --address="$address:$port" "${resources[@]}" &
fi

# On nodes that come later, too: engine.ray.elastic.
if [ -e "$run/config.yaml" ]; then
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" raysim resume "$run" --address "$address:$port"
else
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
        raysim run "$config" --address "$address:$port" --out "$run" engine.ray.elastic=true
fi
