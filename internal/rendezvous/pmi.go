// This file owns what MPICH asks of whatever started it: the first version of PMI (the
// process management interface), as MPICH's mpirun serves it. With it, MPICH works below
// launchers that know nothing of MPI. Each rank answers its own library and takes what
// others said from the rendezvous.
//
// Queries and answers are lines of words such as "cmd=put key=k value=v".

package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// PMI is what one MPI library of this process talks to.
type PMI struct {
	session *Session
	ours    *os.File
	theirs  int    // file descriptor of the library's end
	inode   uint64 // of theirs
	done    chan struct{}
}

const (
	pmiName     = "stowage" // of the library's store
	pmiMaxName  = 256
	pmiMaxKey   = 64
	pmiMaxValue = 512 // with a key and a name it fits a line of the library
)

// ServePMI starts to answer an MPI library that speaks PMI. Call it before the library is
// loaded, and set what Environment returns. All ranks must do so.
func (s *Session) ServePMI() (*PMI, error) {
	syscall.ForkLock.RLock()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(pair[0])
		syscall.CloseOnExec(pair[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, fmt.Errorf("rank %d on %s cannot open a connection to its MPI library: %w", s.place.Rank, s.place.Host, err)
	}
	if err := syscall.SetNonblock(pair[0], true); err != nil {
		return nil, errors.Join(err, syscall.Close(pair[0]), syscall.Close(pair[1]))
	}
	p := &PMI{session: s, ours: os.NewFile(uintptr(pair[0]), "pmi"), theirs: pair[1], inode: inode(pair[1]), done: make(chan struct{})}
	go p.serve()
	return p, nil
}

// inode returns what a file descriptor leads to.
func inode(fd int) uint64 {
	var stat syscall.Stat_t
	if syscall.Fstat(fd, &stat) != nil {
		return 0
	}
	return stat.Ino
}

// Environment returns the variables by which the library finds this end.
func (p *PMI) Environment() map[string]string {
	place := p.session.place
	return map[string]string{
		"PMI_FD":   fmt.Sprint(p.theirs),
		"PMI_RANK": fmt.Sprint(place.Rank),
		"PMI_SIZE": fmt.Sprint(place.Size),
	}
}

// Close ends the service. Call it after the library was finalised.
func (p *PMI) Close() error {
	err := p.ours.Close()
	<-p.done
	if inode(p.theirs) == p.inode { // some versions have closed it, and the number may be another file's
		err = errors.Join(err, syscall.Close(p.theirs))
	}
	return err
}

// serve answers queries until the connection ends. If a rank has failed it answers no more:
// a library that is told of an error ends the process before anybody can say why.
func (p *PMI) serve() {
	defer close(p.done)
	lines := bufio.NewScanner(p.ours)
	for lines.Scan() {
		reply, err := p.reply(parsePMI(lines.Text()))
		if err != nil {
			return
		}
		if reply == "" {
			continue
		}
		if _, err := p.ours.WriteString(reply + "\n"); err != nil {
			return
		}
	}
}

// parsePMI splits a line into its words. A value reaches to the next space.
func parsePMI(line string) map[string]string {
	words := map[string]string{}
	for word := range strings.FieldsSeq(line) {
		if key, value, ok := strings.Cut(word, "="); ok {
			words[key] = value
		}
	}
	return words
}

// reply returns the answer to a query.
func (p *PMI) reply(query map[string]string) (string, error) {
	s, ctx := p.session, context.Background()
	switch cmd := query["cmd"]; cmd {
	case "init":
		return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1", nil
	case "get_maxes":
		return fmt.Sprintf("cmd=maxes rc=0 kvsname_max=%d keylen_max=%d vallen_max=%d", pmiMaxName, pmiMaxKey, pmiMaxValue), nil
	case "get_appnum":
		return "cmd=appnum rc=0 appnum=0", nil
	case "get_universe_size":
		return fmt.Sprintf("cmd=universe_size rc=0 size=%d", s.place.Size), nil
	case "get_my_kvsname":
		return "cmd=my_kvsname rc=0 kvsname=" + pmiName, nil
	case "put":
		err := s.Set(ctx, "pmi/"+query["key"], []byte(query["value"]))
		return "cmd=put_result rc=0 msg=success", err
	case "get":
		value, set, err := p.value(ctx, query["key"])
		if err != nil || set {
			return "cmd=get_result rc=0 msg=success value=" + value, err
		}
		return "cmd=get_result rc=-1 msg=key_not_found value=unknown", nil
	case "barrier_in":
		return "cmd=barrier_out rc=0", s.Barrier(ctx, "pmi")
	case "finalize":
		return "cmd=finalize_ack rc=0", nil
	case "abort":
		s.Abort(fmt.Errorf("its MPI library gave up with code %s", query["exitcode"]))
		return "", s.Err()
	default:
		return fmt.Sprintf("cmd=%s_result rc=-1 msg=unknown_command", cmd), nil
	}
}

// value returns the value of a key.
func (p *PMI) value(ctx context.Context, key string) (string, bool, error) {
	if key == "PMI_process_mapping" {
		m := processMapping(p.session.hosts)
		return m, len(m) <= pmiMaxValue, nil
	}
	value, set, err := p.session.Lookup(ctx, "pmi/"+key)
	return string(value), set, err
}

// processMapping says which ranks share a machine: "(vector,(0,2,4),(2,1,3))" stands for two
// machines with four ranks each, and a third, machine 2, with three. If the library
// is not told it finds out by itself, so a mapping that is too long is left out.
func processMapping(hosts []string) string {
	type block struct{ first, machines, ranks int }
	var blocks []block
	number := map[string]int{}
	for i := 0; i < len(hosts); {
		n := 1
		for i+n < len(hosts) && hosts[i+n] == hosts[i] {
			n++
		}
		machine, seen := number[hosts[i]]
		if !seen {
			machine = len(number)
			number[hosts[i]] = machine
		}
		i += n
		if last := len(blocks) - 1; last >= 0 && blocks[last].ranks == n && blocks[last].first+blocks[last].machines == machine {
			blocks[last].machines++
		} else {
			blocks = append(blocks, block{machine, 1, n})
		}
	}
	var b strings.Builder
	b.WriteString("(vector")
	for _, k := range blocks {
		fmt.Fprintf(&b, ",(%d,%d,%d)", k.first, k.machines, k.ranks)
	}
	return b.String() + ")"
}
