"""A JobSet for Kubernetes: one pod with a launcher on each node; preemptions do not count as restarts."""

from __future__ import annotations

import json

from meshwright.faults.preemption import PREEMPTED
from meshwright_tools.cluster_files.cluster_job import GRACE, OUTSIDE, PAGE, ClusterJob

_TEXT = """\
# {head}.
# To start it: fill in IMAGE and CLAIM, then kubectl apply --server-side -f THIS_FILE. {page} explains it.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: train
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: {outside}
    rules:
      - name: preempted
        action: RestartJobSetAndIgnoreMaxRestarts
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: nodes
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {nodes}
          parallelism: {nodes}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob  # all ranks have saved
                onExitCodes: {{containerName: train, operator: In, values: [{preempted}]}}
              - action: FailJob  # the pod is evicted, or its node drained
                onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace}
              containers:
                - name: train
                  image: IMAGE
                  command: [bash, -c]
                  args:
                    - |
                      exec {launch} \\
                        train.py
                  env:
{environment}
                    - name: JOBSET_UID
                      valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}}}}
{resources}                  volumeMounts:
                    - {{name: checkpoints, mountPath: /checkpoints}}
                    - {{name: shared-memory, mountPath: /dev/shm}}
              volumes:
                - name: checkpoints
                  persistentVolumeClaim: {{claimName: CLAIM}}
                - name: shared-memory
                  emptyDir: {{medium: Memory}}
"""
_RESOURCES = """\
                  resources:
                    limits: {{{name}: {count}}}
"""
# The resources of the vendors' device plugins, by the beginning of a device's name; NVIDIA's otherwise.
_VENDORS = {"mi": "amd.com/gpu", "gaudi": "habana.ai/gaudi"}
_FIRST = "train-nodes-0-0.train"  # <JobSet>-<replicated job>-<job>-<pod>.<subdomain, which is the JobSet's name>


def text(job: ClusterJob) -> str:
    """Return the manifest that ``kubectl apply`` takes."""
    launch = job.launch(
        num_processes=str(job.cluster.nodes * job.cluster.per_node),
        num_machines=str(job.cluster.nodes),
        machine_rank="$JOB_COMPLETION_INDEX",
        main_process_ip=_FIRST if job.cluster.nodes > 1 else "127.0.0.1",
        job_id="$JOBSET_UID",
    )
    environment = [
        f"                    - name: {name}\n                      value: {json.dumps(value)}"
        for name, value in job.environment.items()
    ]
    device = job.cluster.device.name
    resource = next((name for begin, name in _VENDORS.items() if device.startswith(begin)), "nvidia.com/gpu")
    return _TEXT.format(
        head=job.head,
        page=PAGE,
        outside=OUTSIDE,
        nodes=job.cluster.nodes,
        preempted=PREEMPTED,
        grace=GRACE,
        launch=launch.replace("\n", "\n" + " " * 16),
        environment="\n".join(environment),
        resources="" if job.cluster.device.is_cpu else _RESOURCES.format(name=resource, count=job.cluster.per_node),
    )
