# shellcheck shell=bash disable=SC2154
# What a batch script runs, on the first node of its job. sbatch.py puts before it:
#   jobkit_setup, jobkit_teardown   the user's own lines: texts, since in a function `declare -x` would be local to it
#   jobkit_python, jobkit_start, jobkit_srun_args, jobkit_blind_restarts
#   jobkit_runs    the run directory, or those of the tasks of a job array
#   jobkit_failed_starts   a file in it
#   jobkit_resumable, jobkit_failed, jobkit_start_again   exit codes of the supervisor
# The supervisor does the work. Here is what must go on where Python does not: a mount that is broken on this node, a
# module that is not there, a supervisor that was killed. Slurm copies the script, so that no mount can hide it.

# How many nodes in a row may be unable to begin an attempt.
jobkit_most_failed_starts=3

jobkit_run=${jobkit_runs[${SLURM_ARRAY_TASK_ID:-0}]}
jobkit_failed_starts=$jobkit_run/$jobkit_failed_starts
# By the number that the first task of an array has for itself Slurm means all of them.
jobkit_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
jobkit_job=${jobkit_job:-$SLURM_JOB_ID}

# What Slurm says of the job. A controller that is away is asked again: it ends no job at its time limit meanwhile.
jobkit_record() {
    local record pause=2
    until record=$(scontrol -o show job "$jobkit_job" 2>&1); do
        echo "jobkit: $record" >&2
        case "$record" in
            *"nvalid "* | *"enied"* | *"ermission"* | *"not found"*) return 1 ;; # an answer
            *) sleep $pause ;;
        esac
        pause=$((pause * 3 < 60 ? pause * 3 : 60))
    done
    echo "$record"
}

# Put the job into the queue again; not where its owner has cancelled it: a requeue would undo a scancel.
jobkit_requeue() {
    case "$(jobkit_record)" in
        *JobState=RUNNING*) scontrol requeue Incomplete "$jobkit_job" ;; # refused if it is cancelled at this moment
        *JobState=COMPLETING*PreemptTime=2*) scontrol requeue "$jobkit_job" ;;
        *) return 1 ;;
    esac
}

# No attempt could begin on this node: end, and start again on another one.
jobkit_elsewhere() {
    trap '' TERM
    local code=$1 excluded nodes=0
    echo "jobkit: $SLURMD_NODENAME cannot begin an attempt (exit code $code)" >&2
    excluded=$(jobkit_record | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p') # first: it waits for the controller
    if [ -e "$jobkit_failed_starts" ]; then
        [ "$(wc -l <"$jobkit_failed_starts")" -lt $jobkit_most_failed_starts ] || exit 1
        nodes=$(sinfo -h -N -t idle,mix,alloc,comp -p "$SLURM_JOB_PARTITION" -o %N | sort -u | wc -l)
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$jobkit_blind_restarts" ]; then
        exit 1 # it is not the node: the run directory is full or away
    fi
    jobkit_requeue || exit 1
    # Where few nodes are left, the job would wait for ever.
    [ "$nodes" -lt $((SLURM_JOB_NUM_NODES + jobkit_most_failed_starts)) ] ||
        scontrol update "JobId=$jobkit_job" "ExcNodeList=${excluded:+$excluded,}$SLURMD_NODENAME"
    exit 1
}

# The supervisor with these arguments. SIGTERM is ignored until Python takes it: during the imports it would kill.
jobkit_supervisor() (
    trap '' TERM
    exec "$jobkit_python" -u "$jobkit_start" jobkit.supervisor.main "$@"
)

# The user's own last lines, in $SECONDS up to $1: what comes after them has KillWait. With nothing they have no end.
jobkit_tear_down() {
    local until=$1 own
    set -m # they get a process group of their own
    (eval "$jobkit_teardown") & # they may exit
    own=$!
    set +m
    while [ -n "$until" ] && kill -0 $own 2>/dev/null; do
        if [ "$SECONDS" -ge "$until" ]; then
            echo "jobkit: teardown is cut off: the job's time is over, and it must be put into the queue again" >&2
            kill -KILL -- -$own
            break
        fi
        sleep 0.2
    done
    wait $own
}

# When the job's time is over, in $SECONDS; nothing where Slurm does not say.
jobkit_ends_at() {
    local record end
    record=$(TZ=UTC SLURM_TIME_FORMAT=standard timeout 10 scontrol -o show job "$jobkit_job" 2>/dev/null)
    [[ $record =~ \ EndTime=([0-9]+-[0-9-]+T[0-9:]+)\  ]] || return
    end=$(date --utc --date="${BASH_REMATCH[1]}" +%s) && echo $((SECONDS + end - $(date +%s)))
}

# Exit with the code of a supervisor that has decided, and done, what comes next; else return. Python's own exit code for
# a bug is 1, so that of a run that has failed is another one.
jobkit_exit_if_done() {
    case $1 in
        0 | "$jobkit_resumable") exit "$1" ;;
        "$jobkit_failed") exit 1 ;;
    esac
}

# Slurm sends SIGTERM to the whole batch step when it ends a job. What follows needs the time (KillWait) until SIGKILL.
trap : TERM
echo "$SLURMD_NODENAME" >>"$jobkit_failed_starts" # the supervisor removes the file when an attempt has begun

trap 'jobkit_elsewhere $?' EXIT
set -e # a module that does not load must not train without it
eval "$jobkit_setup"
set +eu # srun's arguments may be none, which bash before 4.4 takes for an unset variable
[[ $(trap -p EXIT) != *jobkit_elsewhere* ]] || trap - EXIT # the user's own stays

jobkit_supervisor slurm "$jobkit_run" "${jobkit_srun_args[@]}"
jobkit_code=$?
case $jobkit_code in
    0 | "$jobkit_resumable" | "$jobkit_failed" | "$jobkit_start_again") ;;
    *) [ ! -e "$jobkit_failed_starts" ] || jobkit_elsewhere $jobkit_code ;;
esac

trap '' TERM
case $jobkit_code in
    0 | "$jobkit_resumable" | "$jobkit_failed") jobkit_tear_down "" ;;
    *) [ -z "$jobkit_teardown" ] || jobkit_tear_down "$(jobkit_ends_at)" ;; # without a requeue the run would be over
esac
jobkit_exit_if_done $jobkit_code
for _ in 1 2 3; do # the supervisor may be killed at any line, and `end` is harmless to repeat
    jobkit_supervisor end "$jobkit_run"
    jobkit_exit_if_done $?
    sleep 2 # what Python needs may be back; for a slurmctld or a run directory that is away `end` itself waits
done
[ "${SLURM_RESTART_COUNT:-0}" -lt "$jobkit_blind_restarts" ] && jobkit_requeue
exit 1
