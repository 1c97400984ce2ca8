# shellcheck shell=bash disable=SC2154
# The body of every batch script, on Slurm and on this machine. The submission puts these before it:
#   jobkit_scheduler           slurm or local
#   jobkit_runs                the run directory, or those of the tasks of a job array
#   jobkit_python, jobkit_start, jobkit_srun_args
#   jobkit_setup, jobkit_teardown   the user's own lines
# The supervisor does the work. Here is what goes on where Python does not: a module that does not load, a mount that is
# gone on this node, a supervisor that was killed. Slurm copies the script, so that no mount can hide it.

jobkit_pauses=(0.2 1 2 5)
jobkit_most=3 # supervisors in a row, and starts of the job in a row, that may begin nothing
jobkit_task=0
[ "$jobkit_scheduler" = local ] || jobkit_task=${SLURM_ARRAY_TASK_ID:-0} # here it is that of a job around this one
jobkit_run=${jobkit_runs[$jobkit_task]}
[ "$jobkit_scheduler" = local ] || [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || exec >>"$jobkit_run/submitit/job.log" 2>&1
jobkit_failed_starts=$jobkit_run/submitit/failed_starts # a line for each; the beginning of an attempt removes the file
jobkit_log=$jobkit_run/submitit/job.log
jobkit_node=${SLURMD_NODENAME:-$HOSTNAME}
if [ "$jobkit_scheduler" = slurm ]; then
    # The SLURM_JOB_ID of an array's first task means the whole array.
    JOBKIT_JOB_ID=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    JOBKIT_JOB_ID=${JOBKIT_JOB_ID:-$SLURM_JOB_ID}
else
    JOBKIT_JOB_ID=local-$HOSTNAME-$$
fi
export JOBKIT_JOB_ID
# The lock that says that this job lives; the user's lines may leave daemons, which must not hold it.
[ "${JOBKIT_ALIVE_FD:-9}" = 9 ] || eval "exec 9>&$JOBKIT_ALIVE_FD $JOBKIT_ALIVE_FD>&-"
unset JOBKIT_ALIVE_FD

# Slurm's record of the job. A controller that is away is asked again: it ends no job at its time limit meanwhile.
jobkit_record() {
    local record pause=2
    until record=$(scontrol -o show job "$JOBKIT_JOB_ID" 2>&1); do
        echo "jobkit: $record" >&2
        case "$record" in
            *"nvalid "* | *"enied"* | *"ermission"* | *"not found"*) return 1 ;; # an answer
            *) sleep $pause ;;
        esac
        pause=$((pause * 3 < 60 ? pause * 3 : 60))
    done
    echo "$record"
}

# Put the job into the queue again, by its state alone; a requeue would undo a scancel of its owner.
jobkit_requeue() {
    case $(jobkit_record) in
        # Incomplete: refused if it is cancelled at this moment
        *JobState=RUNNING* | *JobState=SIGNALING*) scontrol requeue Incomplete "$JOBKIT_JOB_ID" ;;
        *) return 1 ;;
    esac
}

# Count a start that has begun nothing yet. False where the disk takes no line, as one that is full or read-only.
jobkit_count() {
    { echo "$jobkit_node ${SLURM_RESTART_COUNT:-0}" >>"$jobkit_failed_starts"; } 2>/dev/null
}

# The run ends here, and no supervisor says so: run the command of --notify, which must be the user's own.
jobkit_give_up() {
    [ ! -O "$jobkit_run/notify" ] || JOBKIT_RUN=$jobkit_run JOBKIT_NAME=${jobkit_run##*/} JOBKIT_STATE=lost \
        JOBKIT_ERROR=$1 JOBKIT_TEXT="${jobkit_run##*/}: lost: $1" timeout 60 bash "$jobkit_run/notify" </dev/null 9>&-
    exit 1
}

# Slurm's commands behind all else on PATH, where a line of the user's has taken them away, as `module purge` may.
jobkit_keep_slurm() {
    [ -z "$jobkit_slurm" ] || type -P scontrol >/dev/null || export PATH="${PATH:+$PATH:}${jobkit_slurm%/*}"
}

# No attempt can begin on this node: end, and start again on another one.
jobkit_elsewhere() {
    trap '' TERM
    trap - EXIT
    local excluded nodes words
    words="$jobkit_node can begin no attempt (exit code $1)${jobkit_line:+; setup: $jobkit_line}"
    echo "jobkit: $words" >&2
    # A disk that takes no count is like that on every node; a folder that is not there at all is this node's fault.
    jobkit_count || [ ! -d "$jobkit_run/submitit" ] || exit 75
    [ "$jobkit_scheduler" = slurm ] || jobkit_give_up "$words"
    # Several starts in a row: it is not the node.
    [ "${SLURM_RESTART_COUNT:-0}" -lt $jobkit_most ] || [ -e "$jobkit_failed_starts" ] || jobkit_give_up "$words"
    [ "$(sort -u "$jobkit_failed_starts" 2>/dev/null | wc -l)" -lt $jobkit_most ] || jobkit_give_up "$words"
    excluded=$(jobkit_record | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p') # first: it waits for the controller
    nodes=$(sinfo -h -N -t idle,mix,alloc,comp -p "$SLURM_JOB_PARTITION" -o %N | sort -u | wc -l)
    jobkit_requeue || exit 1
    # After the requeue: before it Slurm takes no ExcNodeList. With too few nodes the job would wait for ever.
    [ "$nodes" -le $((SLURM_JOB_NUM_NODES + jobkit_most)) ] ||
        scontrol update "JobId=$JOBKIT_JOB_ID" "ExcNodeList=${excluded:+$excluded,}$jobkit_node"
    exit 1
}

# SIGTERM is ignored until Python takes it: during the imports it would kill.
jobkit_supervisor() (
    trap '' TERM
    exec "$jobkit_python" -u "$jobkit_start" jobkit.supervisor.main "$jobkit_scheduler" "$jobkit_run" "$@"
)

# The user's last lines: they may fail and exit, which changes nothing.
jobkit_tear_down() (
    for line in "${jobkit_teardown[@]}"; do
        eval "$line" || echo "jobkit: teardown: exit code $?: $line" >&2
    done 9>&-
)

# Let supervisors work until one says that nothing is left to do in this job, and end.
jobkit_serve() {
    local code began deaths=0 idle=0 # in a row: supervisors that died, and those of them that began nothing
    jobkit_keep_slurm
    if [ "$jobkit_scheduler" = slurm ] && ! type -P scontrol srun >/dev/null; then
        echo "jobkit: no scontrol and srun on PATH of $jobkit_node: each node of the job needs Slurm's commands" >&2
        jobkit_give_up "no scontrol and srun on PATH of $jobkit_node"
    fi
    while true; do
        began=$SECONDS
        jobkit_supervisor "${jobkit_srun_args[@]}"
        code=$?
        case $code in
            0 | 75) break ;;
            3) code=1 && break ;;  # the run has failed; Python itself exits with 1 for a bug
            4) code=75 && break ;; # its disk takes nothing: the same command continues the run once there is room
        esac
        echo "jobkit: the supervisor ended with exit code $code" >&2
        [ $((SECONDS - began)) -lt 60 ] || deaths=0
        # Without a count, on a full disk, no supervisor can have begun anything.
        [ -n "$jobkit_counted" ] && [ ! -e "$jobkit_failed_starts" ] && idle=0 || idle=$((idle + 1))
        [ $idle -lt $jobkit_most ] || jobkit_elsewhere $code
        sleep "${jobkit_pauses[deaths]:-10}"
        deaths=$((deaths + 1))
        jobkit_count && jobkit_counted=yes || jobkit_counted=
    done
    trap '' TERM
    [ -n "$JOBKIT_SETUP_FAILED" ] || jobkit_tear_down
    exit "$code"
}

jobkit_log_size() {
    { wc -c <"$jobkit_log"; } 2>/dev/null || echo 0
}

# A setup line has failed: a module that does not load must not train without it. The supervisor journals that, and
# tries another node.
jobkit_setup_failed() {
    set +eu
    trap : TERM
    trap - EXIT
    JOBKIT_SETUP_FAILED="$jobkit_said $(jobkit_log_size) $1 $jobkit_line"
    export JOBKIT_SETUP_FAILED
    jobkit_serve
}

# Slurm sends SIGTERM to the whole batch step when it ends a job, and KillWait later SIGKILL. Here it is Ctrl-C. Lines
# that fail of it are explained by it.
trap 'export JOBKIT_SIGNALLED=yes' TERM
unset JOBKIT_SETUP_FAILED JOBKIT_SIGNALLED
jobkit_count && jobkit_counted=yes
jobkit_slurm=$([ "$jobkit_scheduler" = local ] || type -P scontrol)
trap 'jobkit_setup_failed $?' EXIT # a line of the user's may exit, as ${DATA:?} does
# `source FILE`, with redirections: not with arguments, as `source activate ENV` has, whose status tells.
jobkit_source='^ *(source|\.) +("[^"]+"|'"'[^']+'"'|[^] ;&|<>]+) *(([0-9]*|&)>>?&? *[^ ;&|<>]+ *)*;? *$'
for jobkit_line in "${jobkit_setup[@]}"; do
    jobkit_said=$(jobkit_log_size) # where the words of this line begin
    # The status of the line counts, as in the user's own shell: no `set -e` for what it sources.
    eval "$jobkit_line" 9>&- || {
        jobkit_code=$?
        # `source rc.sh` has the status of the file's last command, which may be `[ -f x ] && source x`.
        [[ $jobkit_line =~ $jobkit_source ]] && eval "bash -n ${BASH_REMATCH[2]}" && continue
        jobkit_setup_failed $jobkit_code
    }
done
unset jobkit_line
set +eu # as a line of the user's may have set them
trap : TERM
[[ $(trap -p EXIT) != *jobkit_setup_failed* ]] || trap - EXIT # the user's own stays
jobkit_serve
