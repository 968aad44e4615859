#!/usr/bin/env bash
# Runs one training on several hosts over ssh: a launcher of swift-run on each host of a file.
#
#   deploy/ssh/swift-ssh.sh HOSTS [flags of swift-run] SCRIPT [arguments]
#
# HOSTS has one host per line, as ssh takes it (user@host); the hosts must reach each other by these names. A second
# word on a line names the host's failure domain, such as its rack.
# Ctrl-C ends the run on all of them. If this script dies or loses a host, that host's launcher leaves the run.
#
# Variables:
#   MACHINES   hosts that train; the others of the file wait as spares (default: all)
#   RUN        the run's name (default: ssh- and the time)
#   PORT       of the rendezvous store, on the first host (default: 29400)
#   RENDEZVOUS HOST:PORT of a rendezvous store that runs elsewhere (python -m swift_ft.cli.store)
#   WORKDIR    folder on all hosts in which swift-run starts (default: this one)
#   SWIFT_RUN  command that starts swift-run there (default: swift-run)
#   SSH        command that opens a connection (default: ssh with keep-alives, and without questions)
#
# Exit code: that of the launcher that ended last. 255 (ssh lost the host), 143 (it left the run) and 78 (it
# was kept out) count only if there is no other.
set -uo pipefail

if [ $# -lt 2 ] || [ ! -r "$1" ]; then
    echo "usage: swift-ssh.sh HOSTS [flags of swift-run] SCRIPT [arguments]; HOSTS is a readable file" >&2
    exit 2
fi
mapfile -t lines < <(sed -e 's/#.*//' -e 's/[[:space:]]\{1,\}/ /g' -e '/^ *$/d' "$1")
hosts=() domains=()
for line in "${lines[@]}"; do
    read -r host domain <<<"$line"
    hosts+=("$host")
    domains+=("$domain")
done
shift
machines=${MACHINES:-${#hosts[@]}}
if [ "$machines" -lt 1 ] || [ "${#hosts[@]}" -lt "$machines" ]; then
    echo "swift-ssh.sh: ${#hosts[@]} hosts for $machines machines: name more hosts, or lower MACHINES" >&2
    exit 2
fi
rendezvous=${RENDEZVOUS:-${hosts[0]##*@}:${PORT:-29400}}
run=${RUN:-ssh-$(date +%s)}
workdir=${WORKDIR:-$PWD}
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3}"

# What runs on a host, in sh. Its stdin is a lifeline: a line names a signal for the launcher, and the end of the
# connection is SIGTERM.
remote() {
    local host=$1 rank=$2 domain=$3 command
    shift 3
    command=$(printf '%q ' --nnodes "$machines" --node-rank "$rank" --local-addr "${host##*@}" \
        --rdzv-endpoint "$rendezvous" --rdzv-id "$run" ${domain:+--failure-domain "$domain"} "$@")
    cat <<END
cd $(printf '%q' "$workdir") || exit 2
exec 3<&0
${SWIFT_RUN:-swift-run} $command </dev/null 3<&- & launcher=\$!
{ read -r signal <&3 || signal=TERM; kill -s "\$signal" \$launcher; } >/dev/null 2>&1 & lifeline=\$!
wait \$launcher; code=\$?
kill \$lifeline 2>/dev/null
exit \$code
END
}

lifelines=$(mktemp -d)
trap 'rm -rf "$lifelines"' EXIT
declare -A host_of
for rank in "${!hosts[@]}"; do
    host=${hosts[$rank]}
    mkfifo "$lifelines/$rank"
    # In the background of a script Ctrl-C is ignored, so ssh outlives it and brings the launcher's last words.
    {
        "${ssh[@]}" "$host" "$(remote "$host" "$rank" "${domains[$rank]}" "$@")" <"$lifelines/$rank" 2>&1 | sed -u "s/^/[$host] /"
    } &
    host_of[$!]=$host
done
writers=()
for rank in "${!hosts[@]}"; do # only now: no ssh holds the lifeline of another one
    exec {writer}>"$lifelines/$rank"
    writers+=("$writer")
done

# shellcheck disable=SC2329  # the trap calls it
stop() {
    if [ "$stopping" = 1 ]; then # the second time: ends the connections, and with them the launchers
        kill "${!host_of[@]}" 2>/dev/null
    fi
    stopping=1
    echo "swift-ssh.sh: stops the run on all hosts" >&2
    for writer in "${writers[@]}"; do
        echo INT >&"$writer"
    done 2>/dev/null
}
stopping=0
trap stop INT TERM
trap '' PIPE # a launcher that has ended reads no line

result='' fallback=1
while [ "${#host_of[@]}" -gt 0 ]; do
    wait -n -p ended "${!host_of[@]}"
    code=$?
    [ -n "${ended:-}" ] || continue # a signal came
    echo "swift-ssh.sh: ${host_of[$ended]} ended with exit code $code" >&2
    unset "host_of[$ended]"
    case $code in
    255 | 143 | 78) fallback=$code ;;
    *) result=$code ;;
    esac
done
exit "${result:-$fallback}"
