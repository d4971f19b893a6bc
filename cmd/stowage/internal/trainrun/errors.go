// This file owns whose an error is: the user's, who gave a wrong word or too small a
// budget, or the machine's.

package trainrun

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/stash"
	"github.com/stowage-dev/stowage/train"
)

// Wrong is an error in what the user gave.
type Wrong struct{ error }

func (e Wrong) Unwrap() error { return e.error }

// isWrong tells whether an error is one of the user's.
func isWrong(err error) bool { return errors.As(err, &Wrong{}) }

// wrong makes an error of the user's out of one of a package, whose name means
// nothing to the user.
func wrong(err error) error {
	return Wrong{errors.New(plain(err.Error()))}
}

// plain is an error without the names of packages, and with those of flags.
func plain(text string) string {
	text = packages.ReplaceAllString(text, "$1")
	return pages.ReplaceAllString(text, "of the $1 that parameters leave of --budget; raise it, or make microbatches smaller")
}

// pages finds what a runtime says of its budget, which is not the user's.
var pages = regexp.MustCompile(`of a budget of ([0-9.]+ \w+); raise the budget, or give the stash less`)

var packages = regexp.MustCompile(`(^|\s)(?:(?:train|layer|policy|stowage|bucket|capture|offload|stash|schedule|data|comm|fsdp): )+`)

// first is an error of several ranks as the first of them has it: one sentence.
type first struct{ error }

func (e first) Unwrap() error { return e.error }

func (e first) Error() string {
	text, _, _ := strings.Cut(e.error.Error(), "\n")
	return again.ReplaceAllString(plain(text), "rank $1: ")
}

// again finds a rank that is named by two who pass an error on.
var again = regexp.MustCompile(`^rank (\d+): (?:rank \d+:? )+`)

// open makes a trainer. What it refuses is the user's to change, unless the machine
// lacks something.
func open(c train.Config) (*train.Trainer, error) {
	t, err := train.New(c)
	if err != nil {
		return nil, blame(err)
	}
	return t, nil
}

// blame tells errors of the user's from those of the machine's, before the first step.
func blame(err error) error {
	if err = (first{err}); lacking(err) {
		return err
	}
	return wrong(err)
}

// lacking tells whether the machine lacks something.
func lacking(err error) bool {
	var unsupported *device.Unsupported
	var full *device.OutOfMemory
	var driver *device.DriverError
	return errors.As(err, &unsupported) || errors.As(err, &full) || errors.As(err, &driver)
}

// step does a step under a budget, or none; fresh is the first of a trainer.
func step(t *train.Trainer, budget device.Bytes, fresh bool) (train.Metrics, error) {
	m, err := t.Step()
	if err == nil {
		return m, diverged(m)
	}
	if err = refused(err, budget); fresh && !lacking(err) {
		return m, wrong(err) // groups get their names, and budgets their use, in the first step
	}
	return m, err
}

// diverged is the end of a run whose parameters are no numbers any more. The trainer
// looks at the loss, which can be one for a step longer.
func diverged(m train.Metrics) error {
	for _, x := range []float64{m.Loss, m.Aux, m.Norm} {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return fmt.Errorf("training has diverged in step %d: the loss is %.4g, that of routers %.4g, the norm of gradients %.4g; begin anew with a lower --lr", m.Step+1, m.Loss, m.Aux, m.Norm)
		}
	}
	return nil
}

// refused is an error of a step. A budget that turned out to be too small is the
// user's to change; runtimes have what parameters leave of it, and count in bytes.
func refused(err error, budget device.Bytes) error {
	err = first{err}
	if budget == 0 || lacking(err) {
		return err
	}
	said := fmt.Sprintf("%s--budget %s is too small", rank.FindString(err.Error()), page.Size(int64(budget)))
	var low *policy.BelowFloor
	var full *residency.Full
	var over *stash.Overflow
	switch {
	case errors.As(err, &low):
		least := int64(budget) + low.Floor - low.Budget
		host := ""
		if low.HostFull {
			host = ", give more host memory"
		}
		return Wrong{fmt.Errorf("%s for a step with everything moved or recomputed that may be; raise it to %dKiB%s, or make microbatches smaller", said, (least+1023)/1024, host)}
	case errors.As(err, &full):
		return Wrong{fmt.Errorf("%s: %s find no place in the %s that it leaves for activations, of which %s are in use and at most %s free in one run; raise it, or make microbatches smaller",
			said, page.Size(full.Asked), page.Size(full.Limit), page.Size(full.Live), page.Size(full.Run))}
	case errors.As(err, &over):
		return Wrong{fmt.Errorf("%s for the rows of experts: %s; raise it, or make microbatches smaller", said, over.Why)}
	}
	return err
}

// rank finds the rank that an error is of.
var rank = regexp.MustCompile(`^rank \d+: `)
