#!/bin/bash
# Two machines with eight GPUs each under Slurm, for a run that takes longer than one allocation:
# sbatch recipes/accelerate/slurm.sh recipes/cifar10/vit_b16_384.yaml [key=value …] [--out DIR]
#
# Two minutes before the time is over every process gets SIGUSR1, saves and ends with 138; the job
# then goes back into the queue, and goes on where it was. So it does after preemption and the loss of
# a machine, with which Slurm requeues it itself. The folder must be on a disk that all machines see.
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

# Each task is one process. It is told by Slurm which one, and how many there are this time.
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
