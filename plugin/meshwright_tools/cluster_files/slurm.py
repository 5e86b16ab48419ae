"""A batch file for Slurm, with a launcher on each node; a preempted job and one that has lost a node start again."""

from __future__ import annotations

from meshwright.faults.preemption import PREEMPTED
from meshwright_tools.cluster_files.cluster_job import GRACE, OUTSIDE, PAGE, ClusterJob

_TEXT = """\
#!/bin/bash
# {head}.
# To submit it: sbatch THIS_FILE [train.py ARGUMENTS]. {page} says what each line is for.
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{grace}

[ $# -gt 0 ] || set -- train.py
{exports}
# With sbatch --nodes=1-{nodes}, a job goes on with the nodes that are left, and the planner picks their plan.
[ "$SLURM_JOB_NUM_NODES" = {nodes} ] || unset MESHWRIGHT_PLAN
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export FIRST PORT=$((20000 + SLURM_JOB_ID % 10000))

# Each node's launcher may end up to a minute after the first one, since all of them save.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --wait=60 bash -c '
    exec {launch} \\
        "$@"' launcher "$@" &
step=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1  # {grace} s before the end, or by scancel --batch --signal=USR1
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do  # the signal has ended the wait, and the ranks save
    wait "$step"
    code=$?
done

# Exit code {preempted}: all ranks have saved, which may happen any number of times. Above 128, a signal has ended the
# launcher or a process, as when a node is lost: the file has a line for each time, and {outside} are too many.
is_counted_failure() {{
    failures="$SLURM_JOB_NAME-$SLURM_JOB_ID.failures"
    [ "$code" -gt 128 ] && echo "$(date): exit code $code" >> "$failures" && [ "$(wc -l < "$failures")" -le {outside} ]
}}
if [ "$code" = {preempted} ] || is_counted_failure; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script
fi
exit "$code"
"""


def text(job: ClusterJob) -> str:
    """Return the file that ``sbatch`` takes."""
    launch = job.launch(
        num_processes=f"$((SLURM_JOB_NUM_NODES * {job.cluster.per_node}))",
        num_machines='"$SLURM_JOB_NUM_NODES"',
        machine_rank='"$SLURM_NODEID"',
        main_process_ip='"$FIRST"',
        main_process_port='"$PORT"',
        job_id='"slurm-$SLURM_JOB_ID"',
    )
    return _TEXT.format(
        head=job.head,
        page=PAGE,
        nodes=job.cluster.nodes,
        gpus="" if job.cluster.device.is_cpu else f"#SBATCH --gpus-per-node={job.cluster.per_node}\n",
        grace=GRACE,
        preempted=PREEMPTED,
        outside=OUTSIDE,
        exports=job.exports(),
        launch=launch,
    )
