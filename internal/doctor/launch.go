// This file owns what the report says of the launcher: the place of this process among
// ranks, and whether they could find each other.

package doctor

import (
	"fmt"
	"os"
	"strings"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// Launch is the place that a launcher gave to this process.
type Launch struct {
	Name      string `json:"name"` // "torchrun"
	Rank      int    `json:"rank"`
	Size      int    `json:"size"`
	LocalRank *int   `json:"local_rank,omitempty"` // among the ranks of the machine, if the launcher says
	LocalSize *int   `json:"local_size,omitempty"`
	Host      string `json:"host"`
	Leader    string `json:"leader,omitempty"` // host of rank 0, if the launcher says
	Restart   int    `json:"restart"`
	GPU       string `json:"gpu,omitempty"` // "cuda:1", which the rank takes
}

// examineLauncher finds what started this process, and whether its ranks could meet.
func (r *Report) examineLauncher(p Probe, gpus int) {
	place, err := p.Place()
	if err != nil {
		r.unclear = true
		r.advise("launcher", err)
	}
	if place == nil {
		return
	}
	l := &Launch{Name: place.Launcher.String(), Rank: place.Rank, Size: place.Size, Host: place.Host, Leader: place.Leader, Restart: place.Restart}
	if place.LocalKnown {
		l.LocalRank, l.LocalSize = &place.LocalRank, &place.LocalSize
	}
	r.Launcher = l
	if gpus > 0 {
		if n, err := place.GPU(os.Getenv, gpus); err != nil {
			r.advise("GPU", err)
		} else {
			l.GPU = fmt.Sprintf("cuda:%d", n)
		}
	}
	if err := r.startable(place); err != nil {
		r.advise("launcher", err)
	}
}

// startable returns nil if one of the MPI libraries finds its peers, or if there is none.
func (r *Report) startable(place *launcher.Place) (first error) {
	for _, l := range r.Libraries {
		if l.Name != "MPI" || l.Path == "" {
			continue
		}
		kind := launcher.PMI
		if strings.HasPrefix(l.Version, "Open MPI") {
			kind = launcher.OpenMPI
		}
		_, err := place.StartsMPI(kind)
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// advise adds an entry for an error whose last part says what to do.
func (r *Report) advise(what string, err error) {
	why, do := err.Error(), "see what the launcher sets"
	if i := strings.LastIndex(why, "; "); i >= 0 {
		why, do = why[:i], why[i+2:]
	}
	r.miss(what, why, do)
}

func (r *Report) launcherText(line func(name, format string, args ...any)) {
	l := r.Launcher
	switch {
	case r.unclear:
		line("unclear", "see below")
		return
	case l == nil:
		line("none", "this process was started alone and holds all ranks")
		return
	}
	line(l.Name, "rank %d of %d on %s", l.Rank, l.Size, l.Host)
	if l.LocalRank != nil {
		line("", "number %d of the %d on this machine, counted from 0", *l.LocalRank, *l.LocalSize)
	}
	if l.GPU != "" {
		line("", "takes %s", l.GPU)
	}
	if l.Leader != "" {
		line("", "led by %s", l.Leader)
	}
	if l.Restart > 0 {
		line("", "started again %d times", l.Restart)
	}
}
