#!/bin/bash
# Two machines with eight GPUs each under Slurm, for a run that takes longer than one allocation:
# sbatch recipes/accelerate/slurm.sh recipes/cifar10/vit_b16_384.yaml [key=value …] [--out DIR]
#
# Two minutes before the time limit, every process receives SIGUSR1, saves, and exits with 138. The
# script then requeues the job, which continues from the checkpoint. After preemption or the failure of
# a machine, Slurm itself requeues it. The run directory must be on a shared disk.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Each task is one process. Slurm sets its rank and the number of processes of this allocation.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -m finetune train "$@" --resume' finetune "$@"
code=$?
if [ "$code" -eq 138 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
