# Source this. `trains "$@"` states whether train.py trains with these flags, and does not only print or rehearse: a script
# then replaces the results of an earlier run, and summarizes the new ones.

trains() {
    local word
    for word in "$@"; do
        case "$word" in --explain | --rehearse | --help | -h | --version) return 1 ;; esac
    done
}
