package layer

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

func mambaModel() *model.Model {
	return tiny("mamba", model.Layer{Mamba: &model.Mamba{Version: 2, Inner: 24, Heads: 6, Groups: 2, State: 5, Conv: 4}})
}

// mambaSeq is longer than a chunk of the scan, so that states pass between chunks.
const mambaSeq = 70

func TestGradientsOfMamba(t *testing.T) {
	for _, seq := range []int{2, 8, mambaSeq} {
		checkGradients(t, mambaModel(), rigOptions{seq: seq})
	}
}

// Gradients have the same bits whichever groups are kept, recomputed or offloaded.
func TestMambaUnderEveryChoice(t *testing.T) { // SPEC S5.2
	want := newRig(t, mambaModel(), rigOptions{seq: mambaSeq}).results(2)
	choices := []memory.Choice{memory.Keep, memory.Recompute, memory.Offload}
	for _, in := range choices {
		for _, scan := range choices {
			for _, norm := range []memory.Choice{memory.Keep, memory.Offload} { // x cannot be recomputed
				p := memory.Policy{{Name: "attn_norm"}: norm, {Name: "mamba_in"}: in, {Name: "mamba_scan"}: scan}
				r := newRig(t, mambaModel(), rigOptions{seq: mambaSeq, recompute: p})
				if !slices.Equal(r.results(2), want) {
					t.Errorf("%v differs", p)
				}
				for _, g := range r.rt.Summary(memory.Key{Microbatches: 1}).Groups {
					c, chosen := p[memory.Unit{Name: g.Name}]
					if chosen && (g.Units[c] != 1 || (c == memory.Offload) != (g.Moved > 0)) {
						t.Errorf("%v: %s was not treated by its choice", p, g.Name)
					}
				}
			}
		}
	}
}

// The loss in bf16 equals that in fp32 up to rounding.
func TestMambaOfBF16(t *testing.T) {
	want := newRig(t, mambaModel(), rigOptions{seq: mambaSeq}).step()
	got := newRig(t, mambaModel(), rigOptions{seq: mambaSeq, number: kernels.BF16}).step()
	if got == want || math.Abs(got-want) > 0.01 {
		t.Errorf("the loss is %g in bf16 and %g in fp32", got, want)
	}
}

// Initial parameters follow the paper, and the same seed gives the same ones.
func TestMambaBegins(t *testing.T) {
	r := newRig(t, mambaModel(), rigOptions{})
	for suffix, within := range map[string][2]float64{
		"mixer.A_log": {0, math.Log(16)}, "mixer.D": {1, 1}, "mixer.norm.weight": {1, 1},
		// The softplus of the bias is between 0.001 and 0.1.
		"mixer.dt_bias": {math.Log(math.Expm1(0.001)), math.Log(math.Expm1(0.1))},
	} {
		for _, u := range r.chunk.Units {
			if !slices.ContainsFunc(u.Params, func(p Param) bool { return strings.HasSuffix(p.Name, suffix) }) {
				continue
			}
			p := u.Params[u.index(suffix)]
			x := p.Values(7, 1)
			for _, v := range x {
				if !(float64(v) >= within[0]-1e-6 && float64(v) <= within[1]+1e-6) {
					t.Errorf("%s begins with %g", suffix, v)
				}
			}
			if within[0] < within[1] && slices.Equal(x, p.Values(8, 1)) || !slices.Equal(x, p.Values(7, 1)) {
				t.Errorf("%s does not follow from the seed", suffix)
			}
		}
	}
}

// plainMamba computes the layer token by token in float64. The columns of the input
// projection are the gate, x, B, C and the steps, in this order.
type plainMamba struct {
	model.Mamba
	hidden, seq int
	w           map[string][]float64
}

func (m *plainMamba) forward(x []float64) (y []float64) {
	tokens, mixed := len(x)/m.hidden, m.Inner+2*m.Groups*m.State
	width := m.Inner + mixed + m.Heads
	in := make([]float64, tokens*width)
	for t := range tokens {
		xn := plainNorm(x[t*m.hidden:(t+1)*m.hidden], m.w["norm.weight"])
		copy(in[t*width:], plainProduct(m.w["mixer.in_proj.weight"], xn))
	}
	state := map[int][]float64{}
	taps, bias := m.w["mixer.conv1d.weight"], m.w["mixer.conv1d.bias"]
	for t := range tokens {
		xbc := make([]float64, mixed)
		for c := range xbc {
			s := bias[c]
			for k := range m.Conv {
				if back := m.Conv - 1 - k; back <= t%m.seq {
					s += taps[c*m.Conv+k] * in[(t-back)*width+m.Inner+c]
				}
			}
			xbc[c] = plainSiLU(s)
		}
		if t%m.seq == 0 {
			clear(state)
		}
		v := m.recur(state, xbc, in[t*width+m.Inner+mixed:])
		for c := range v {
			v[c] *= plainSiLU(in[t*width+c])
		}
		group := m.Inner / m.Groups
		for g := range m.Groups {
			copy(v[g*group:], plainNorm(v[g*group:(g+1)*group], m.w["mixer.norm.weight"][g*group:]))
		}
		for i, o := range plainProduct(m.w["mixer.out_proj.weight"], v) {
			y = append(y, x[t*m.hidden+i]+o)
		}
	}
	return y
}

// recur computes the output of a token and updates the states of heads.
func (m *plainMamba) recur(state map[int][]float64, xbc, steps []float64) []float64 {
	y, dim := make([]float64, m.Inner), m.Inner/m.Heads
	for h := range m.Heads {
		if state[h] == nil {
			state[h] = make([]float64, dim*m.State)
		}
		g := h / (m.Heads / m.Groups)
		b, c := xbc[m.Inner+g*m.State:], xbc[m.Inner+(m.Groups+g)*m.State:]
		dt := math.Log1p(math.Exp(steps[h] + m.w["mixer.dt_bias"][h]))
		decay := math.Exp(-dt * math.Exp(m.w["mixer.A_log"][h]))
		for i := range dim {
			x := xbc[h*dim+i]
			y[h*dim+i] = m.w["mixer.D"][h] * x
			for j := range m.State {
				s := &state[h][i*m.State+j]
				*s = decay**s + dt*x*b[j]
				y[h*dim+i] += *s * c[j]
			}
		}
	}
	return y
}

func plainNorm(x, w []float64) []float64 {
	var square float64
	for _, v := range x {
		square += v * v / float64(len(x))
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = v / math.Sqrt(square+1e-5) * w[i]
	}
	return y
}

func plainProduct(w, x []float64) []float64 {
	y := make([]float64, len(w)/len(x))
	for i := range y {
		for j, v := range x {
			y[i] += w[i*len(x)+j] * v
		}
	}
	return y
}

func plainSiLU(x float64) float64 { return x / (1 + math.Exp(-x)) }

// The layer and its gradients follow plainMamba, with steps so long that decays matter.
func TestMambaIsWhatItSays(t *testing.T) {
	r := newRig(t, mambaModel(), rigOptions{seq: mambaSeq})
	m := r.chunk.blocks[0].parts[0].(*mamba)
	u, rng := m.norm.u, rand.New(rand.NewPCG(9, 9))
	plain := plainMamba{Mamba: m.Mamba, hidden: r.env.Model.Hidden, seq: mambaSeq, w: map[string][]float64{}}
	short := func(i int) string { return strings.TrimPrefix(u.Params[i].Name, "layers.0.") }
	for i := range u.Params {
		x := r.get(u, i, 0)
		for k := range x {
			switch short(i) {
			case "mixer.dt_bias", "mixer.A_log":
				x[k] = -1
			}
			x[k] += 0.3 * float32(rng.NormFloat64())
		}
		r.set(u, i, x)
		plain.w[short(i)] = widened(x)
	}
	n := r.env.Shape.Tokens() * plain.hidden
	x, dy, y, dx := make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n)
	for i := range x {
		x[i], dy[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
	}
	for _, b := range r.mem {
		r.s.Fill(b[1].All(), 0)
	}
	ok(t, r.rt.Step(memory.Key{Microbatches: 1}, func(st *engine.Step) error {
		return Guard(func() {
			p := &Pass{Step: st, S: r.s, Shape: r.env.Shape}
			done, err := r.Use(true, u)
			must(err)
			in, dout := p.New(p.Tokens(), plain.hidden), p.New(p.Tokens(), plain.hidden)
			r.s.Upload(in.Range, floats(x))
			r.s.Upload(dout.Range, floats(dy))
			out := m.Forward(p, in)
			din := m.Backward(p, dout)
			must(r.s.Download(floats(y), out.Range))
			must(r.s.Download(floats(dx), din.Range))
			for _, f := range []Mat{in, dout, out, din} {
				f.Free()
			}
			done()
		})
	}))
	in := widened(x)
	for i, want := range plain.forward(in) {
		if math.Abs(float64(y[i])-want) > 1e-5*(1+math.Abs(want)) {
			t.Fatalf("number %d is %g, want %g", i, y[i], want)
		}
	}
	loss := func() (sum float64) {
		for i, v := range plain.forward(in) {
			sum += v * float64(dy[i])
		}
		return sum
	}
	wantSlopes(t, "x", rng, loss, in, dx)
	for i := range u.Params {
		wantSlopes(t, short(i), rng, loss, plain.w[short(i)], r.get(u, i, 1))
	}
}

// wantSlopes compares some elements of a gradient with differences of the loss.
func wantSlopes(t *testing.T, name string, rng *rand.Rand, loss func() float64, x []float64, dx []float32) {
	t.Helper()
	for range 6 {
		const h = 1e-5
		k := rng.IntN(len(x))
		was := x[k]
		x[k] = was + h
		up := loss()
		x[k] = was - h
		down := loss()
		x[k] = was
		if want := (up - down) / (2 * h); math.Abs(float64(dx[k])-want) > 2e-5*(1+math.Abs(want)) {
			t.Errorf("the gradient of %s[%d] is %g, differences give %g", name, k, dx[k], want)
		}
	}
}

func widened(x []float32) (y []float64) {
	for _, v := range x {
		y = append(y, float64(v))
	}
	return y
}
